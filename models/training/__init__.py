"""Training of small models: corpus, tokenizer, optimizer, loop."""
