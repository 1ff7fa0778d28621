"""The command ``sparsync lab``: run any script unchanged, with every rank behind a slow link."""
