"""`python -m statebridge`, which is what `accelerate launch -m statebridge` starts."""

from statebridge.cli.app import main

if __name__ == "__main__":
    main()
