"""Fixture of the launchers of clouds: the command."""

from slurm_cluster import launch as launch
