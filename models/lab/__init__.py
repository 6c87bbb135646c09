"""Instruments: what measures, plans, counts, trains and predicts."""
