"""Predictions of training speed on more ranks, with intervals and their causes."""
