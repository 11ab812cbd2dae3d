"""What `tieredkv doctor` looks at: software, machine, and what a configuration asks of them."""
