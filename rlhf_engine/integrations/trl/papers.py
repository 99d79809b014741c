"""The papers that model cards cite, one for each of our trainers, as TRL's card wants them."""

from __future__ import annotations


def _paper(key: str, arxiv: str, year: int, title: str, authors: str) -> dict[str, str]:
    fields = {
        "title": f"{{{title}}}",
        "author": authors,
        "year": str(year),
        "eprint": arxiv,
        "archivePrefix": "arXiv",
    }
    lines = [f"    {name:<13} = {{{value}}}," for name, value in fields.items()]
    return {"title": title, "id": arxiv, "citation": "\n".join([f"@article{{{key},", *lines, "}"])}


HYDRA = _paper(
    "santacroce2023efficient",
    "2309.00754",
    2023,
    "Efficient RLHF: Reducing the Memory Usage of PPO",
    "Michael Santacroce and Yadong Lu and Han Yu and Yuanzhi Li and Yelong Shen",
)
REMAX = _paper(
    "li2023remax",
    "2310.10505",
    2023,
    "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    "Ziniu Li and Tian Xu and Yushun Zhang and Zhihang Lin and Yang Yu and Ruoyu Sun and Zhi-Quan Luo",
)
RLOO = _paper(
    "ahmadian2024back",
    "2402.14740",
    2024,
    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    "Arash Ahmadian and Chris Cremer and others",
)
ONLINE_DPO = _paper(
    "guo2024direct",
    "2402.04792",
    2024,
    "Direct Language Model Alignment from Online AI Feedback",
    "Shangmin Guo and Biao Zhang and others",
)
PERL = _paper(
    "sidahmed2024perl",
    "2403.10704",
    2024,
    "PERL: Parameter Efficient Reinforcement Learning from Human Feedback",
    "Hakim Sidahmed and Samrat Phatale and others",
)
GRPO = _paper(
    "shao2024deepseekmath",
    "2402.03300",
    2024,
    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "Zhihong Shao and Peiyi Wang and others",
)
BEST_OF_N = _paper(
    "stiennon2020learning",
    "2009.01325",
    2020,
    "Learning to summarize from human feedback",
    "Nisan Stiennon and Long Ouyang and others",
)
