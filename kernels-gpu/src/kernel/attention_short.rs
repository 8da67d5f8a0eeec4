//! attention_short
