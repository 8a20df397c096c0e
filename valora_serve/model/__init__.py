"""Computes: the base model with LoRA, attention, heads and sampling."""
