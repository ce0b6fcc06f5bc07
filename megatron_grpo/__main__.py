from megatron_grpo.cli import main

main()
