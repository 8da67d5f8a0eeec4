//! item
