"""Part: language models: text, tokens, tokenizers, a GPT, and their task."""
