"""Hugging Face models on packed chunks of many sequences; nothing here knows gRPC, proposals, verdicts or sampling."""
