"""Accelerate, Lightning and the Hugging Face Trainer: one module each."""
