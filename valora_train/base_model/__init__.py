"""How the base model valora-tiny was pretrained; nothing imports this package."""
