"""Flags of the commands, with their help texts, which are shown without imports of torch."""

CHECK_FLAGS = {"--batch": "also train eight steps, validate and test, and say what is silently wrong"}
DOCTOR_FLAGS = {"--test": "train on all devices of this machine, and show what works"}
