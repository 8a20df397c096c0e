"""The recipe of the base model valora-tiny; nothing else imports it."""
