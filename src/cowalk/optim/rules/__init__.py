"""The rules, by family. What may not live here: how a rule's step gets into a model (`cowalk.optim.applying`)."""
