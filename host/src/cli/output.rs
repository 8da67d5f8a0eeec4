//! Results on standard output: `println!` would panic where it is closed or full.
use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;

use attn_backward::Error;
use attn_backward::file::FileError;

/// Prints a line. A reader that has left (`| head`) ends the program quietly.
pub fn line(text: impl Display) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(source) => {
            Err(FileError::Io { path: PathBuf::from("standard output"), action: "write to it", source }.into())
        }
    }
}
