"""The verifier service: runs the target model and judges proposals. It knows nothing of who drafts, or how."""
