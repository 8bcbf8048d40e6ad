"""Runs Hugging Face models on packed chunks of many sequences. Knows nothing of gRPC, proposals, verdicts or sampling."""
