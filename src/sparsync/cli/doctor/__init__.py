"""``sparsync doctor``: the ranks' facts, the checks on them, and the page that shows both."""
