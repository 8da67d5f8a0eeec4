//! attention_long
