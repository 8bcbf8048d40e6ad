"""Runs models on batches of many sequences, and decode loops. Independent of gRPC and its messages."""
