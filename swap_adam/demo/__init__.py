"""The demonstration: a small GPT, trained with AdamW and with SwapAdamW, from one seed."""
