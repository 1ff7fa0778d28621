"""The command ``sparsync lab``: any script, unchanged, with every rank behind a slow link."""
