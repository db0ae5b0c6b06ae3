"""Launchers of managed clouds. Does not import torch, so that login nodes need none."""
