"""What a choice costs: closed forms, integers and floats in, integers and floats out."""
