"""The contract: `.proto` files and the code generated from them. It imports nothing of ours."""
