"""The table: one row a question, as Markdown to be read and as JSON lines to be compared.

It is written after every row, so that a run that is cut off leaves what it saw.
"""

import json
import os

YES, NO, NOT_ASKED = "yes", "no", "not asked"


class Table:
    def __init__(self, directory, head):
        self.directory = directory
        self.head = head
        self.rows = []

    def answer(self, number, question, expected, seen, holds, evidence=""):
        """A question that was asked: whether what was seen is what was expected."""
        self._add(number, question, expected, seen, YES if holds else NO, evidence)

    def reported(self, number, question, seen, evidence=""):
        """A question without a right answer: a figure that is wanted."""
        self._add(number, question, "to be learnt", seen, YES, evidence)

    def not_asked(self, number, question, why, evidence=""):
        """A question that couldn't be asked, and why."""
        self._add(number, question, "", why, NOT_ASKED, evidence)

    def _add(self, number, question, expected, seen, answer, evidence):
        row = {
            "number": number,
            "question": question,
            "expected": expected,
            "seen": seen,
            "answer": answer,
            "evidence": evidence,
        }
        self.rows.append(row)
        print(f"{number:5} {answer.upper() if answer == NO else answer:9} {question}: {seen}", flush=True)
        self.write()

    def count(self, answer):
        return sum(row["answer"] == answer for row in self.rows)

    def write(self):
        lines = ["# What was seen", ""]
        lines += [f"- {key}: {value}" for key, value in self.head.items()]
        lines += [
            "",
            f"{self.count(YES)} as expected or reported, {self.count(NO)} not as expected, "
            f"{self.count(NOT_ASKED)} not asked.",
            "",
            "| no | question | expected | seen | as expected | evidence |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            answer = "**no**" if row["answer"] == NO else row["answer"]
            cells = [row["number"], row["question"], row["expected"], row["seen"], answer, row["evidence"]]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        self._replace("table.md", "\n".join(lines) + "\n")
        rows = [{"head": self.head}] + self.rows
        self._replace("table.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def _replace(self, name, text):
        path = os.path.join(self.directory, name)
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".new", path)
