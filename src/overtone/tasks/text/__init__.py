"""The task "language": texts, tokenizers and causal language models.

A text goes this way: ``documents.py`` or ``stream.py`` reads documents, ``tokenizer.py`` makes tokens of them,
``windows.py`` makes samples of the tokens, ``task.py`` trains ``byte_model.py`` or ``hf_models.py`` on the samples.
"""
