//! Splits PTX text into tokens.

use crate::Error;

/// One token, with its place in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    /// The token: a word (`ld.global.b32`, `%r1`, `$L__BB0_1`, `0f3F800000`), a string with its quotes, or one punctuation character.
    pub text: &'a str,
    /// Byte offset of its first character.
    pub start: usize,
    /// Line, from 1.
    pub line: usize,
}

impl Token<'_> {
    /// Byte offset after its last character.
    pub fn end(&self) -> usize {
        self.start + self.text.len()
    }
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

/// The tokens of `source`, comments left out.
///
/// # Errors
/// [`Error::Parse`] for an open comment or string, or a character that is not ASCII.
pub(crate) fn tokens(source: &str) -> Result<Vec<Token<'_>>, Error> {
    let bytes = source.as_bytes();
    let mut out = Vec::new();
    let (mut at, mut line) = (0, 1);
    let fail = |line: usize, message: &str| Error::Parse { line, message: message.into() };
    while at < bytes.len() {
        let rest = &bytes[at..];
        let start = at;
        match rest[0] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            c if c.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'/' if rest.starts_with(b"//") => {
                at += rest.iter().position(|&c| c == b'\n').unwrap_or(rest.len());
                continue;
            }
            b'/' if rest.starts_with(b"/*") => {
                let length = source[at..].find("*/").ok_or_else(|| fail(line, "comment without an end"))? + 2;
                line += rest[..length].iter().filter(|&&c| c == b'\n').count();
                at += length;
                continue;
            }
            b'"' => {
                let length = rest[1..].iter().position(|&c| c == b'"');
                at += length.ok_or_else(|| fail(line, "string without an end"))? + 2;
            }
            c if is_word(c) => {
                while at < bytes.len() {
                    if is_word(bytes[at]) {
                        at += 1;
                    } else if bytes[at..].starts_with(b"::") {
                        at += 2; // `shared::cta`; a single colon ends a label
                    } else {
                        break;
                    }
                }
            }
            c if c.is_ascii() => at += 1,
            _ => return Err(fail(line, "character that is not ASCII")),
        }
        out.push(Token { text: &source[start..at], start, line });
    }
    Ok(out)
}
