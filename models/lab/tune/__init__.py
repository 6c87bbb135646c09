"""Finds the fastest way to decode on this machine."""
