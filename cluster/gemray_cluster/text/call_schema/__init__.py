"""Arguments of required calls: from the JSON schema of a function's parameters to rules of a grammar."""
