//! An entry's body: scopes, registers, labels and statements. What each statement means is decided in [`crate::decode`].

use std::collections::HashMap;

use crate::Error;
use crate::decode;
use crate::lex::Token;
use crate::module::{Cursor, SharedLayout, Symbol};
use crate::op::{Address, Data, Instruction, Op, Predicate, Program, Reg, Special};

/// A declared register.
#[derive(Clone, Copy, Debug)]
enum Register {
    Predicate(Reg),
    /// With its bits: 8, 16 or 32.
    Word(Reg, u32),
    Long(Reg),
}

/// An operand as written.
#[derive(Clone, Debug)]
pub(crate) enum Operand<'a> {
    /// A register, symbol or literal, perhaps after `-` or `!`.
    Name { text: &'a str, prefixed: bool },
    /// `p|q`.
    Pair(&'a str, &'a str),
    /// `{a, b}`.
    List(Vec<Operand<'a>>),
    /// `[base+offset]`.
    Address { base: &'a str, offset: i64 },
    /// `[base, {x, y}]`.
    Tensor { base: &'a str, coordinates: Vec<Operand<'a>> },
}

/// An instruction as written, its guard taken off.
pub(crate) struct Statement<'a> {
    /// Up to the first dot of the opcode.
    pub name: &'a str,
    /// The rest of the opcode, split at dots; what has been understood is removed.
    pub modifiers: Vec<&'a str>,
    pub operands: Vec<Operand<'a>>,
}

impl<'a> Statement<'a> {
    /// Removes a modifier, if it is there.
    pub fn take(&mut self, modifier: &str) -> bool {
        let found = self.modifiers.iter().position(|m| *m == modifier);
        found.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// Removes and returns the first of `modifiers` that is there.
    pub fn take_one_of(&mut self, modifiers: &[&'static str]) -> Option<&'static str> {
        modifiers.iter().find(|m| self.take(m)).copied()
    }

    /// Removes and returns the last modifier: the type of most instructions.
    pub fn take_last(&mut self) -> &'a str {
        self.modifiers.pop().unwrap_or("")
    }
}

#[derive(Default)]
struct Scope<'a> {
    parent: Option<usize>,
    registers: HashMap<&'a str, Register>,
    /// `%r<9>`: the registers `%r0` to `%r8`.
    ranges: HashMap<&'a str, Vec<Register>>,
    labels: HashMap<&'a str, u32>,
    branch_tables: HashMap<&'a str, Vec<&'a str>>,
}

/// A branch whose target is not known yet.
struct Fixup<'a> {
    instruction: usize,
    scope: usize,
    /// A label, or a branch table if the instruction is indexed.
    name: &'a str,
}

/// An entry being decoded.
pub(crate) struct Body<'a, 'm> {
    program: Program,
    scopes: Vec<Scope<'a>>,
    scope: usize,
    fixups: Vec<Fixup<'a>>,
    symbols: &'m mut HashMap<String, Symbol>,
    words: HashMap<u32, Reg>,
    longs: HashMap<u64, Reg>,
    predicates: HashMap<bool, Reg>,
    specials: HashMap<(Special, bool), Data>,
    /// Guard, line and text of the statement at hand.
    guard: Option<Predicate>,
    line: usize,
    text: std::ops::Range<u32>,
}

/// The value of an integer literal.
pub(crate) fn integer(text: &str) -> Option<u64> {
    let text = text.strip_suffix('U').unwrap_or(text);
    if let Some(hex) = text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        u64::from_str_radix(hex, 16).ok()
    } else if let Some(binary) = text.strip_prefix("0b") {
        u64::from_str_radix(binary, 2).ok()
    } else if text.len() > 1 && text.starts_with('0') {
        u64::from_str_radix(text, 8).ok()
    } else {
        text.parse().ok()
    }
}

/// The value of a floating-point literal, and whether it was written as single precision.
fn float(text: &str) -> Option<(f64, bool)> {
    if let Some(hex) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        return u32::from_str_radix(hex, 16).ok().map(|bits| (f32::from_bits(bits) as f64, true));
    }
    if let Some(hex) = text.strip_prefix("0d").or(text.strip_prefix("0D")) {
        return u64::from_str_radix(hex, 16).ok().map(|bits| (f64::from_bits(bits), false));
    }
    text.contains('.').then(|| text.parse().ok().map(|x| (x, false))).flatten()
}

/// Parses and decodes a body; the cursor is after its `{`.
pub(crate) fn parse<'a>(
    cursor: &mut Cursor<'a>,
    symbols: &mut HashMap<String, Symbol>,
    shared: &mut SharedLayout,
) -> Result<Program, Error> {
    let mut body = Body {
        program: Program::default(),
        scopes: vec![Scope::default()],
        scope: 0,
        fixups: Vec::new(),
        symbols,
        words: HashMap::new(),
        longs: HashMap::new(),
        predicates: HashMap::new(),
        specials: HashMap::new(),
        guard: None,
        line: 0,
        text: 0..0,
    };
    let mut label = "";
    loop {
        let token = cursor.next()?;
        body.line = token.line;
        match token.text {
            "{" => {
                body.scopes.push(Scope { parent: Some(body.scope), ..Scope::default() });
                body.scope = body.scopes.len() - 1;
            }
            "}" => match body.scopes[body.scope].parent {
                Some(parent) => body.scope = parent,
                None => break,
            },
            ";" => {}
            ".reg" => body.declare(cursor)?,
            ".shared" => shared.declare(cursor, body.symbols)?,
            ".local" => return Err(body.error("local memory is not simulated")),
            ".pragma" => while cursor.next()?.text != ";" {},
            ".loc" => {
                while cursor.peek().is_some_and(|next| next.line == token.line) {
                    cursor.next()?;
                }
            }
            ".branchtargets" => {
                let mut labels = Vec::new();
                loop {
                    labels.push(cursor.next()?.text);
                    if !cursor.take(",") {
                        break;
                    }
                }
                cursor.expect(";")?;
                body.scopes[body.scope].branch_tables.insert(label, labels);
            }
            text if cursor.peek().is_some_and(|next| next.text == ":") => {
                cursor.next()?;
                label = text;
                let at = body.program.instructions.len() as u32;
                if body.scopes[body.scope].labels.insert(text, at).is_some() {
                    return Err(body.error(format!("label `{text}` twice in one scope")));
                }
            }
            _ => body.statement(cursor, token)?,
        }
    }
    body.guard = None;
    body.emit(Op::Exit);
    body.resolve()
}

impl<'a> Body<'a, '_> {
    /// A parse error at the statement at hand.
    pub fn error(&self, message: impl Into<String>) -> Error {
        Error::Parse { line: self.line, message: message.into() }
    }

    /// The operation that was appended last.
    pub fn last(&self) -> Option<&Op> {
        self.program.instructions.last().map(|instruction| &instruction.op)
    }

    /// Appends an operation of the statement at hand.
    pub fn emit(&mut self, op: Op) {
        let (line, text) = (self.line as u32, self.text.clone());
        let collective = op.is_collective();
        self.program.instructions.push(Instruction { guard: self.guard, op, collective, line, text });
    }

    /// Appends a branch to a label, or through a table of labels.
    pub fn emit_branch(&mut self, op: Op, name: &'a str) {
        self.fixups.push(Fixup { instruction: self.program.instructions.len(), scope: self.scope, name });
        self.emit(op);
    }

    fn declare(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Error> {
        let kind = cursor.next()?.text;
        loop {
            let name = cursor.next()?;
            if cursor.take("<") {
                let count = cursor.number()?;
                cursor.expect(">")?;
                let registers = (0..count).map(|_| self.new_register(kind)).collect::<Result<Vec<_>, _>>()?;
                self.scopes[self.scope].ranges.insert(name.text, registers);
            } else {
                let register = self.new_register(kind)?;
                self.scopes[self.scope].registers.insert(name.text, register);
            }
            if !cursor.take(",") {
                break;
            }
        }
        cursor.expect(";").map(|_| ())
    }

    fn new_register(&mut self, kind: &str) -> Result<Register, Error> {
        let next = |count: &mut u32| {
            *count += 1;
            *count - 1
        };
        Ok(match kind {
            ".pred" => Register::Predicate(next(&mut self.program.predicates)),
            ".b8" | ".u8" | ".s8" => Register::Word(next(&mut self.program.words), 8),
            ".b16" | ".u16" | ".s16" | ".f16" => Register::Word(next(&mut self.program.words), 16),
            ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" => Register::Word(next(&mut self.program.words), 32),
            ".b64" | ".u64" | ".s64" | ".f64" => Register::Long(next(&mut self.program.longs)),
            _ => return Err(self.error(format!("registers of type `{kind}` are not simulated"))),
        })
    }

    /// The register of a name, looked up from the innermost scope outwards.
    fn register(&self, name: &str) -> Option<Register> {
        let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (prefix, number) = name.split_at(digits);
        let mut scope = Some(self.scope);
        while let Some(at) = scope {
            let scope_here = &self.scopes[at];
            if let Some(register) = scope_here.registers.get(name) {
                return Some(*register);
            }
            if let (Some(range), Ok(number)) = (scope_here.ranges.get(prefix), number.parse::<usize>())
                && let Some(register) = range.get(number)
            {
                return Some(*register);
            }
            scope = scope_here.parent;
        }
        None
    }

    /// Parses from the first token of an instruction to its `;`.
    fn statement(&mut self, cursor: &mut Cursor<'a>, first: Token<'a>) -> Result<(), Error> {
        let mut opcode = first;
        self.guard = None;
        if first.text == "@" {
            let negated = cursor.take("!");
            let name = cursor.next()?.text;
            let Some(Register::Predicate(index)) = self.register(name) else {
                return Err(self.error(format!("`{name}` is not a predicate register")));
            };
            self.guard = Some(Predicate { index, negated });
            opcode = cursor.next()?;
        }
        let mut operands = Vec::new();
        while cursor.peek().is_some_and(|next| next.text != ";") {
            operands.push(self.operand(cursor)?);
            if !cursor.take(",") {
                break;
            }
        }
        let end = cursor.expect(";")?;
        self.text = first.start as u32..end.end() as u32;
        let mut parts = opcode.text.split('.');
        let name = parts.next().unwrap_or("");
        decode::statement(self, Statement { name, modifiers: parts.collect(), operands })
    }

    fn operand(&self, cursor: &mut Cursor<'a>) -> Result<Operand<'a>, Error> {
        let token = cursor.next()?;
        Ok(match token.text {
            "{" => {
                let mut list = Vec::new();
                loop {
                    list.push(self.operand(cursor)?);
                    if !cursor.take(",") {
                        break;
                    }
                }
                cursor.expect("}")?;
                Operand::List(list)
            }
            "[" => {
                let base = cursor.next()?.text;
                if cursor.take(",") {
                    let Operand::List(coordinates) = self.operand(cursor)? else {
                        return Err(self.error("expected coordinates in braces"));
                    };
                    cursor.expect("]")?;
                    return Ok(Operand::Tensor { base, coordinates });
                }
                let mut offset = 0;
                while !cursor.take("]") {
                    let negative = !cursor.take("+") && cursor.expect("-").is_ok();
                    let negative = negative ^ cursor.take("-");
                    let number = cursor.number()? as i64;
                    offset += if negative { -number } else { number };
                }
                Operand::Address { base, offset }
            }
            "-" | "!" => Operand::Name { text: cursor.next()?.text, prefixed: true },
            text if cursor.peek().is_some_and(|next| next.text == "|") => {
                cursor.next()?;
                Operand::Pair(text, cursor.next()?.text)
            }
            text => Operand::Name { text, prefixed: false },
        })
    }

    fn word_constant(&mut self, value: u32) -> Reg {
        *self.words.entry(value).or_insert_with(|| {
            let index = self.program.words;
            self.program.words += 1;
            self.program.word_constants.push((index, value));
            index
        })
    }

    fn long_constant(&mut self, value: u64) -> Reg {
        *self.longs.entry(value).or_insert_with(|| {
            let index = self.program.longs;
            self.program.longs += 1;
            self.program.long_constants.push((index, value));
            index
        })
    }

    /// The register that holds a special value, as a word or as a long.
    fn special(&mut self, special: Special, long: bool) -> Data {
        let program = &mut self.program;
        *self.specials.entry((special, long)).or_insert_with(|| {
            let count = if long { &mut program.longs } else { &mut program.words };
            let data = if long { Data::Long(*count) } else { Data::Word(*count) };
            *count += 1;
            program.specials.push((data, special));
            data
        })
    }

    /// A source operand of 32 bits or fewer.
    pub fn word(&mut self, operand: &Operand<'a>) -> Result<Reg, Error> {
        let Operand::Name { text, prefixed } = *operand else {
            return Err(self.error("expected a register or a literal"));
        };
        if let Some(register) = self.register(text) {
            return match register {
                Register::Word(index, _) if !prefixed => Ok(index),
                _ => Err(self.error(format!("`{text}` is not a register of 32 bits or fewer"))),
            };
        }
        if let Some(special) = special_register(text) {
            return Ok(match self.special(special, false) {
                Data::Word(index) | Data::Long(index) => index,
            });
        }
        if let Some((value, _)) = float(text) {
            let value = value as f32;
            return Ok(self.word_constant(if prefixed { -value } else { value }.to_bits()));
        }
        if let Some(value) = integer(text) {
            return Ok(self.word_constant(if prefixed { value.wrapping_neg() } else { value } as u32));
        }
        match self.symbols.get(text).copied() {
            Some(Symbol::DynamicShared) => Ok(match self.special(Special::DynamicShared, false) {
                Data::Word(index) | Data::Long(index) => index,
            }),
            Some(Symbol::Shared(at) | Symbol::Param(at) | Symbol::Constant(at)) => Ok(self.word_constant(at as u32)),
            None => Err(self.error(format!("unknown name `{text}`"))),
        }
    }

    /// A source operand of 64 bits.
    pub fn long(&mut self, operand: &Operand<'a>) -> Result<Reg, Error> {
        let Operand::Name { text, prefixed } = *operand else {
            return Err(self.error("expected a register or a literal"));
        };
        if let Some(register) = self.register(text) {
            return match register {
                Register::Long(index) if !prefixed => Ok(index),
                _ => Err(self.error(format!("`{text}` is not a register of 64 bits"))),
            };
        }
        if let Some((value, _)) = float(text) {
            return Ok(self.long_constant(if prefixed { -value } else { value }.to_bits()));
        }
        if let Some(value) = integer(text) {
            return Ok(self.long_constant(if prefixed { value.wrapping_neg() } else { value }));
        }
        match self.symbols.get(text).copied() {
            Some(Symbol::DynamicShared) => Ok(match self.special(Special::DynamicShared, true) {
                Data::Word(index) | Data::Long(index) => index,
            }),
            Some(Symbol::Shared(at) | Symbol::Param(at) | Symbol::Constant(at)) => Ok(self.long_constant(at)),
            None => Err(self.error(format!("unknown name `{text}`"))),
        }
    }

    /// A source operand of `bits` bits.
    pub fn data(&mut self, operand: &Operand<'a>, bits: u32) -> Result<Data, Error> {
        Ok(if bits == 64 { Data::Long(self.long(operand)?) } else { Data::Word(self.word(operand)?) })
    }

    /// A source operand of at least `bits` bits: a register of any width that has them, or a literal.
    pub fn data_of_either(&mut self, operand: &Operand<'a>, bits: u32) -> Result<Data, Error> {
        match *operand {
            Operand::Name { text, .. } if matches!(self.register(text), Some(Register::Long(_))) => {
                self.data(operand, 64)
            }
            _ => self.data(operand, bits),
        }
    }

    /// A destination register of any general type, with its bits. `_` is a register that nobody reads.
    pub fn destination(&mut self, operand: &Operand<'a>, default_bits: u32) -> Result<(Data, u32), Error> {
        let Operand::Name { text, prefixed: false } = *operand else {
            return Err(self.error("expected a register"));
        };
        if text == "_" {
            let kind = if default_bits == 64 { ".b64" } else { ".b32" };
            return match self.new_register(kind)? {
                Register::Long(index) => Ok((Data::Long(index), 64)),
                Register::Word(index, bits) => Ok((Data::Word(index), bits)),
                Register::Predicate(_) => Err(self.error("expected a register")),
            };
        }
        match self.register(text) {
            Some(Register::Word(index, bits)) => Ok((Data::Word(index), bits)),
            Some(Register::Long(index)) => Ok((Data::Long(index), 64)),
            _ => Err(self.error(format!("`{text}` is not a general register"))),
        }
    }

    /// A destination of 32 bits or fewer.
    pub fn word_destination(&mut self, operand: &Operand<'a>) -> Result<Reg, Error> {
        match self.destination(operand, 32)? {
            (Data::Word(index), _) => Ok(index),
            _ => Err(self.error("expected a destination of 32 bits or fewer")),
        }
    }

    /// A destination of 64 bits.
    pub fn long_destination(&mut self, operand: &Operand<'a>) -> Result<Reg, Error> {
        match self.destination(operand, 64)? {
            (Data::Long(index), _) => Ok(index),
            _ => Err(self.error("expected a destination of 64 bits")),
        }
    }

    /// A predicate source, perhaps negated, or the literals 0 and 1.
    pub fn predicate(&mut self, operand: &Operand<'a>) -> Result<Predicate, Error> {
        let Operand::Name { text, prefixed } = *operand else {
            return Err(self.error("expected a predicate"));
        };
        if let Some(value) = integer(text) {
            let value = value != 0;
            let program = &mut self.program;
            let index = *self.predicates.entry(value).or_insert_with(|| {
                program.predicates += 1;
                program.predicate_constants.push((program.predicates - 1, value));
                program.predicates - 1
            });
            // `-1` is true as `1` is.
            return Ok(Predicate { index, negated: false });
        }
        self.predicate_named(text).map(|index| Predicate { index, negated: prefixed })
    }

    /// A predicate register.
    pub fn predicate_named(&mut self, name: &str) -> Result<Reg, Error> {
        match self.register(name) {
            Some(Register::Predicate(index)) => Ok(index),
            None if name == "_" => {
                self.program.predicates += 1;
                Ok(self.program.predicates - 1)
            }
            _ => Err(self.error(format!("`{name}` is not a predicate register"))),
        }
    }

    /// A predicate destination.
    pub fn predicate_destination(&mut self, operand: &Operand<'a>) -> Result<Reg, Error> {
        match *operand {
            Operand::Name { text, prefixed: false } => self.predicate_named(text),
            _ => Err(self.error("expected a predicate register")),
        }
    }

    /// An address operand.
    pub fn address(&mut self, operand: &Operand<'a>) -> Result<Address, Error> {
        let Operand::Address { base, offset } = *operand else {
            return Err(self.error("expected an address in brackets"));
        };
        let name = Operand::Name { text: base, prefixed: false };
        let base = match self.register(base) {
            Some(Register::Word(index, 32)) => Data::Word(index),
            _ => Data::Long(self.long(&name)?),
        };
        Ok(Address { base, offset })
    }

    /// Fills in branch targets.
    fn resolve(mut self) -> Result<Program, Error> {
        for fixup in std::mem::take(&mut self.fixups) {
            self.line = self.program.instructions[fixup.instruction].line as usize;
            let target = |name: &'a str| {
                self.find(fixup.scope, |scope| scope.labels.get(name).copied())
                    .ok_or_else(|| self.error(format!("unknown label `{name}`")))
            };
            let op = match self.program.instructions[fixup.instruction].op {
                Op::BranchIndexed { index, .. } => {
                    let labels = self
                        .find(fixup.scope, |scope| scope.branch_tables.get(fixup.name).cloned())
                        .ok_or_else(|| self.error(format!("unknown branch table `{}`", fixup.name)))?;
                    Op::BranchIndexed { index, targets: labels.into_iter().map(target).collect::<Result<_, _>>()? }
                }
                _ => Op::Branch { target: target(fixup.name)? },
            };
            self.program.instructions[fixup.instruction].op = op;
        }
        Ok(self.program)
    }

    fn find<T>(&self, scope: usize, get: impl Fn(&Scope<'a>) -> Option<T>) -> Option<T> {
        let mut scope = Some(scope);
        while let Some(at) = scope {
            if let Some(found) = get(&self.scopes[at]) {
                return Some(found);
            }
            scope = self.scopes[at].parent;
        }
        None
    }
}

fn special_register(name: &str) -> Option<Special> {
    Some(match name {
        "%tid.x" => Special::Tid,
        "%ntid.x" => Special::Ntid,
        "%ctaid.x" => Special::Ctaid(0),
        "%ctaid.y" => Special::Ctaid(1),
        "%ctaid.z" => Special::Ctaid(2),
        "%nctaid.x" => Special::Nctaid(0),
        "%nctaid.y" => Special::Nctaid(1),
        "%nctaid.z" => Special::Nctaid(2),
        "%cluster_ctarank" => Special::ClusterRank,
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%nwarpid" => Special::Warps,
        "%smid" => Special::Sm,
        "%tid.y" | "%tid.z" => Special::Zero,
        "%ntid.y" | "%ntid.z" | "%nsmid" => Special::One,
        "%lanemask_lt" => Special::LaneMaskLt,
        "%lanemask_le" => Special::LaneMaskLe,
        "%lanemask_eq" => Special::LaneMaskEq,
        "%lanemask_gt" => Special::LaneMaskGt,
        "%lanemask_ge" => Special::LaneMaskGe,
        "%dynamic_smem_size" => Special::DynamicSharedBytes,
        _ => return None,
    })
}
