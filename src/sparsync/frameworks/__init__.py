"""Adapters for Accelerate, Lightning and the Hugging Face Trainer, with one module for each."""
