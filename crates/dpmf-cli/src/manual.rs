//! `dpmf completions` and `dpmf man`: what shells and `man` know of the program, made from its own definition.

use crate::output;
use crate::report::Report;
use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use dpmf::disk::Access;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Print the shell script that completes commands, flags and values
///
/// Once the shell has read this script, Tab completes commands and flags. Put it in the folder where your shell looks
/// for completions, or load it when the shell starts.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  dpmf completions bash > ~/.local/share/bash-completion/completions/dpmf\n  \
    dpmf completions fish > ~/.config/fish/completions/dpmf.fish\n  dpmf completions zsh > ~/.zfunc/_dpmf\n  \
    source <(dpmf completions bash)"
)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Print the manual page, or write the pages of all commands to a folder
///
/// The pages have the text of --help in the format of `man`: dpmf.1, and one page for each command, such as dpmf-train.1.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dpmf man | man -l -\n  dpmf man --out ~/.local/share/man/man1")]
pub struct Args {
    /// Write the pages of all commands to this folder, and create it if necessary
    #[arg(long, short, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// The program's definition, its commands with their full names.
fn program() -> Command {
    let mut program = crate::program();
    program.build();
    program
}

pub fn completions(args: &CompletionsArgs) -> anyhow::Result<Report> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::program(), "dpmf", &mut script);
    let script = String::from_utf8(script).context("the script is not text")?;
    Ok(Report::new(json!({ "shell": args.shell.to_string(), "script": script }), script))
}

pub fn run(args: &Args) -> anyhow::Result<Report> {
    let pages = pages(&program())?;
    let Some(folder) = &args.out else {
        let page = pages.into_iter().next().map_or_else(String::new, |(_, page)| page);
        return Ok(Report::new(json!({ "page": page }), page));
    };
    output::check_folder(folder)?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut written: Vec<PathBuf> = Vec::new();
    for (name, page) in pages {
        let path = folder.join(name);
        output::check(&path)?;
        output::save(&path, Access::Everyone, |file| file.write_all(page.as_bytes()))?;
        written.push(path);
    }
    let text = format!("{} pages written to {}", written.len(), Path::display(folder));
    Ok(Report::new(json!({ "out": folder, "pages": written }), text))
}

/// Names and texts of the pages, that of the program first.
fn pages(command: &Command) -> anyhow::Result<Vec<(String, String)>> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut page = Vec::new();
    Man::new(command.clone().disable_help_flag(true)).render(&mut page)?;
    let page = String::from_utf8(page).context("the page is not text")?;
    let mut all = vec![(format!("{name}.1"), page)];
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        all.extend(pages(below)?);
    }
    Ok(all)
}
