"""Parts of GGUF files: header, tensors, configuration, tokenizer."""
