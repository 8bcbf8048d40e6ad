"""Runs Hugging Face models on batches of many sequences. Independent of gRPC, proposals, verdicts and sampling."""
