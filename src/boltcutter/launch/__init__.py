"""Launchers: start runs on this machine or a cluster. Does not import torch, so that login nodes need none."""
