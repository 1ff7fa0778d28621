"""Thin adapters to training loops; no algorithm lives here."""
