"""The large multimodal model in training, with its adapters."""
