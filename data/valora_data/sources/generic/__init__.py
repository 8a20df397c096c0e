"""Generic drawn scenes: what the base model was pretrained on."""
