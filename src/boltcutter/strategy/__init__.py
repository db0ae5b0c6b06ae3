"""Strategies that Lightning lacks: how a model is spread over devices."""
