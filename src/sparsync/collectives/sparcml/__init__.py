"""SparCML's sparse allreduces (Renggli et al., SC 2019)."""
