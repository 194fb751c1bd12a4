"""The expert axis: MoE layers whose experts live on other ranks than the tokens that are sent to them."""
