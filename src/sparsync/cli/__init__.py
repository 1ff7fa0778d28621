"""The command line: ``sparsync train | bench | linear | lab | doctor | plan | simulate | keys``."""
