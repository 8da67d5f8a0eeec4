//! Module scope: directives, variables, entries and their parameters.

use std::collections::HashMap;
use std::sync::Arc;

use crate::Error;
use crate::body;
use crate::lex::{self, Token};
use crate::op::Program;
use crate::shared::SHARED_BASE;

/// The module's `.const` and initialised `.global` variables start here, in an address range of their own.
pub(crate) const CONSTANT_BASE: u64 = 1 << 28;

/// A parsed PTX module.
pub struct Module {
    entries: Vec<Entry>,
    pub(crate) source: Arc<str>,
    /// Bytes of constants, from [`CONSTANT_BASE`].
    pub(crate) constants: Vec<u8>,
}

/// Most blocks of a cluster on every GPU.
const MAX_CLUSTER_SIZE: u64 = 8;

/// A kernel of a module.
pub struct Entry {
    name: String,
    parameter_bytes: usize,
    max_threads: Option<u32>,
    cluster_size: u32,
    static_shared_bytes: usize,
    pub(crate) program: Program,
}

impl Entry {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size of its parameter list in bytes, as the host lays it out: each parameter at a multiple of its alignment.
    pub fn parameter_bytes(&self) -> usize {
        self.parameter_bytes
    }

    /// The most threads a block may have (`.maxntid`), if the entry says so.
    pub fn max_threads(&self) -> Option<u32> {
        self.max_threads
    }

    /// Blocks of a cluster, in x (`.reqnctapercluster`); 1: the entry has no clusters.
    pub fn cluster_size(&self) -> u32 {
        self.cluster_size
    }

    /// Bytes of statically sized shared memory, up to where dynamic shared memory starts.
    pub fn static_shared_bytes(&self) -> usize {
        self.static_shared_bytes
    }
}

/// What a name at module or function scope stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Symbol {
    /// Byte offset in the parameter list.
    Param(u64),
    /// Address in shared memory.
    Shared(u64),
    /// Start of dynamic shared memory, which depends on all static variables of the entry.
    DynamicShared,
    /// Address of a constant.
    Constant(u64),
}

/// A variable declaration after its state space.
struct Variable<'a> {
    name: &'a str,
    align: u64,
    element_bytes: u64,
    /// `None` for `name[]`.
    bytes: Option<u64>,
}

/// Reads tokens one by one.
pub(crate) struct Cursor<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).copied()
    }

    pub fn next(&mut self) -> Result<Token<'a>, Error> {
        let token = self.peek().ok_or_else(|| self.fail("unexpected end of the text"))?;
        self.at += 1;
        Ok(token)
    }

    /// Takes the next token if it is `text`.
    pub fn take(&mut self, text: &str) -> bool {
        let found = self.peek().is_some_and(|token| token.text == text);
        self.at += found as usize;
        found
    }

    pub fn expect(&mut self, text: &str) -> Result<Token<'a>, Error> {
        let token = self.next()?;
        if token.text == text {
            return Ok(token);
        }
        Err(Error::Parse { line: token.line, message: format!("expected `{text}`, found `{}`", token.text) })
    }

    pub fn number(&mut self) -> Result<u64, Error> {
        let token = self.next()?;
        body::integer(token.text).ok_or_else(|| Error::Parse {
            line: token.line,
            message: format!("expected a number, found `{}`", token.text),
        })
    }

    pub fn fail(&self, message: impl Into<String>) -> Error {
        let token = self.tokens.get(self.at).or(self.tokens.last());
        Error::Parse { line: token.map_or(1, |token| token.line), message: message.into() }
    }

    /// Skips to after the `}` of a `{` that was taken.
    fn skip_block(&mut self) -> Result<(), Error> {
        let mut depth = 1;
        while depth > 0 {
            match self.next()?.text {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    fn variable(&mut self) -> Result<Variable<'a>, Error> {
        let (mut align, mut pointer) = (None, false);
        let mut element_bytes = 1;
        let mut name = self.next()?;
        while let Some(word) = name.text.strip_prefix('.') {
            match word {
                "align" => {
                    let bytes = self.number()?;
                    // After `.ptr` it is the pointee's alignment.
                    align = if pointer { align } else { Some(bytes) };
                }
                "ptr" | "global" | "shared" | "const" | "param" => pointer = true,
                _ => match word.get(1..).and_then(|bits| bits.parse::<u64>().ok()) {
                    Some(bits) => element_bytes = bits / 8,
                    None => return Err(self.fail(format!("unknown type `.{word}`"))),
                },
            }
            name = self.next()?;
        }
        let mut bytes = Some(element_bytes);
        while self.take("[") {
            if self.take("]") {
                bytes = None;
            } else {
                let count = self.number()?;
                bytes = bytes.map(|bytes| bytes * count);
                self.expect("]")?;
            }
        }
        Ok(Variable { name: name.text, align: align.unwrap_or(element_bytes), element_bytes, bytes })
    }
}

/// Where shared variables lie: static ones first, then dynamic memory.
#[derive(Clone, Default)]
pub(crate) struct SharedLayout {
    static_bytes: u64,
    dynamic_align: u64,
}

impl SharedLayout {
    /// Declares a variable; the cursor is after `.shared`.
    pub fn declare(&mut self, cursor: &mut Cursor, symbols: &mut HashMap<String, Symbol>) -> Result<(), Error> {
        let variable = cursor.variable()?;
        cursor.expect(";")?;
        let symbol = match variable.bytes {
            Some(bytes) => {
                let start = self.static_bytes.next_multiple_of(variable.align.max(1));
                self.static_bytes = start + bytes;
                Symbol::Shared(SHARED_BASE + start)
            }
            None => {
                self.dynamic_align = self.dynamic_align.max(variable.align);
                Symbol::DynamicShared
            }
        };
        symbols.insert(variable.name.into(), symbol);
        Ok(())
    }

    /// Bytes before dynamic shared memory.
    fn dynamic_start(&self) -> usize {
        self.static_bytes.next_multiple_of(self.dynamic_align.max(16)) as usize
    }
}

impl Module {
    /// Parses the text of a module and decodes its entries.
    ///
    /// # Errors
    /// [`Error::Parse`], with its line, for what is not PTX and for instructions and directives that are not simulated.
    pub fn parse(source: &str) -> Result<Module, Error> {
        let mut cursor = Cursor { tokens: lex::tokens(source)?, at: 0 };
        let mut module = Module { entries: Vec::new(), source: source.into(), constants: Vec::new() };
        let mut symbols = HashMap::new();
        let mut shared = SharedLayout::default();
        while cursor.peek().is_some() {
            let token = cursor.next()?;
            match token.text {
                ".version" | ".target" | ".address_size" | ".file" | ".loc" => {
                    while cursor.peek().is_some_and(|next| next.line == token.line) {
                        cursor.next()?;
                    }
                }
                ".visible" | ".extern" | ".weak" | ".common" | ";" => {}
                ".pragma" => while cursor.next()?.text != ";" {},
                ".section" => {
                    cursor.next()?;
                    cursor.expect("{")?;
                    cursor.skip_block()?;
                }
                ".shared" => shared.declare(&mut cursor, &mut symbols)?,
                ".global" | ".const" => module.constant(&mut cursor, &mut symbols)?,
                ".func" => loop {
                    match cursor.next()?.text {
                        ";" => break,
                        "{" => break cursor.skip_block()?,
                        _ => {}
                    }
                },
                ".entry" => {
                    module.entries.push(entry(&mut cursor, symbols.clone(), shared.clone())?);
                }
                text => return Err(Error::Parse { line: token.line, message: format!("unknown directive `{text}`") }),
            }
        }
        Ok(module)
    }

    /// The module's entries, in the order of the text.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry of a name.
    ///
    /// # Errors
    /// [`Error::UnknownEntry`].
    pub fn entry(&self, name: &str) -> Result<&Entry, Error> {
        self.entries.iter().find(|entry| entry.name == name).ok_or_else(|| Error::UnknownEntry {
            entry: name.into(),
            available: self.entries.iter().map(|entry| entry.name.clone()).collect(),
        })
    }

    /// A variable with its values, after `.global` or `.const`.
    fn constant(&mut self, cursor: &mut Cursor, symbols: &mut HashMap<String, Symbol>) -> Result<(), Error> {
        let variable = cursor.variable()?;
        let bytes = variable.bytes.ok_or_else(|| cursor.fail("variable without a size"))? as usize;
        if !cursor.take("=") {
            return Err(cursor.fail(format!("variable `{}` without a value is not simulated", variable.name)));
        }
        let start = self.constants.len().next_multiple_of(variable.align.max(4) as usize);
        self.constants.resize(start, 0);
        let list = cursor.take("{");
        loop {
            let negative = cursor.take("-");
            let value = cursor.number()?;
            let value = if negative { value.wrapping_neg() } else { value };
            self.constants.extend(&value.to_le_bytes()[..variable.element_bytes as usize]);
            if !cursor.take(",") {
                break;
            }
        }
        if list {
            cursor.expect("}")?;
        }
        cursor.expect(";")?;
        self.constants.resize((start + bytes).next_multiple_of(4), 0);
        symbols.insert(variable.name.into(), Symbol::Constant(CONSTANT_BASE + start as u64));
        Ok(())
    }
}

/// An entry, after `.entry`.
fn entry(cursor: &mut Cursor, mut symbols: HashMap<String, Symbol>, mut shared: SharedLayout) -> Result<Entry, Error> {
    let name = cursor.next()?.text.to_string();
    let mut parameter_bytes = 0u64;
    if cursor.take("(") {
        while !cursor.take(")") {
            cursor.expect(".param")?;
            let variable = cursor.variable()?;
            let bytes = variable.bytes.ok_or_else(|| cursor.fail("parameter without a size"))?;
            parameter_bytes = parameter_bytes.next_multiple_of(variable.align.max(1));
            symbols.insert(variable.name.into(), Symbol::Param(parameter_bytes));
            parameter_bytes += bytes;
            cursor.take(",");
        }
    }
    let mut max_threads = None;
    let mut cluster_size = 1;
    while !cursor.take("{") {
        let directive = cursor.next()?;
        let numbers: Result<Vec<u64>, Error> = std::iter::from_fn(|| {
            let number = cursor.peek().is_some_and(|token| token.text.as_bytes()[0].is_ascii_digit());
            number.then(|| {
                let value = cursor.number();
                cursor.take(",");
                value
            })
        })
        .collect();
        match directive.text {
            ".maxntid" | ".reqntid" => max_threads = Some(numbers?.iter().product::<u64>() as u32),
            ".reqnctapercluster" => {
                cluster_size = match numbers?[..] {
                    [x] | [x, 1] | [x, 1, 1] if (1..=MAX_CLUSTER_SIZE).contains(&x) => x as u32,
                    _ => return Err(cursor.fail("expected the blocks of a cluster, in x alone")),
                };
            }
            ".explicitcluster" | ".minnctapersm" | ".maxnreg" | ".maxnctapersm" | ".noreturn" => _ = numbers?,
            ".pragma" => while cursor.next()?.text != ";" {},
            text => return Err(Error::Parse { line: directive.line, message: format!("unknown directive `{text}`") }),
        }
    }
    let program = body::parse(cursor, &mut symbols, &mut shared)?;
    Ok(Entry {
        name,
        parameter_bytes: parameter_bytes as usize,
        max_threads,
        cluster_size,
        static_shared_bytes: shared.dynamic_start(),
        program,
    })
}
