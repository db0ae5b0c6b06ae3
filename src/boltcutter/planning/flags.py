"""Flags of the commands, with their help texts, which are shown without imports of torch."""

CHECK_FLAGS = {"--batch": "also train, validate and test one batch"}
DOCTOR_FLAGS = {"--test": "train on all devices of this machine, and show what works"}
