"""The demo pair: how its corpus, tokenizer, target and draft are made and measured. Nothing else imports this."""
