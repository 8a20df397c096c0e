"""The policies, one a file; `valora_serve.orchestrator.registry` lists them by name."""
