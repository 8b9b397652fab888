"""Language modelling: texts, tokenizers, models."""
