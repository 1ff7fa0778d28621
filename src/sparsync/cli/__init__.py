"""The command line: ``sparsync train | bench | linear | doctor | plan | simulate | keys``."""
