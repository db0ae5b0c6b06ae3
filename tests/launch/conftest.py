"""Fixtures of launchers: a SLURM cluster, runs on Ray, and the command."""

from slurm_cluster import cluster as cluster
from slurm_cluster import launch as launch
from slurm_cluster import run as run
