"""What run_all.py and the tests share: comparing output, running scripts, the environment."""
