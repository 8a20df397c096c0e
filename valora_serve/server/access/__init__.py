"""API keys, rate limits and admission."""
